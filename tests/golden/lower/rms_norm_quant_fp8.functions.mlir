module {
  func.func @rms_norm_quant_fp8(%arg0: memref<?x?xbf16>, %arg1: memref<?xbf16>, %arg2: memref<?x?xbf16>, %arg3: memref<?x?xi8>, %arg4: memref<?x?xbf16>, %arg5: f32, %arg6: f32, %arg7: index, %arg8: index) attributes {kiln.args = ["x", "weight", "residual", "out:out", "residual:out", "eps", "scale", "%rows", "%width"]} {
    scf.forall (%arg9) in (%arg7) {
      %0 = "kiln.load"(%arg0, %arg9) : (memref<?x?xbf16>, index) -> tensor<?xbf16>
      %1 = "kiln.load"(%arg1) : (memref<?xbf16>) -> tensor<?xbf16>
      %2 = "kiln.load"(%arg2, %arg9) : (memref<?x?xbf16>, index) -> tensor<?xbf16>
      %3 = arith.extf %0 : tensor<?xbf16> to tensor<?xf32>
      %4 = arith.extf %2 : tensor<?xbf16> to tensor<?xf32>
      %5 = arith.addf %3, %4 : tensor<?xf32>
      %6 = arith.truncf %5 : tensor<?xf32> to tensor<?xbf16>
      %7 = arith.extf %6 : tensor<?xbf16> to tensor<?xf32>
      %8 = arith.mulf %7, %7 : tensor<?xf32>
      %cst = arith.constant 0.000000e+00 : f32
      %splat = tensor.splat %cst : tensor<f32>
      %reduced = linalg.reduce ins(%8 : tensor<?xf32>) outs(%splat : tensor<f32>) dimensions = [0]  {kiln.order = "pair_tree"}
        (%in: f32, %init: f32) {
          %24 = arith.addf %in, %init : f32
          linalg.yield %24 : f32
        }
      %extracted = tensor.extract %reduced[] : tensor<f32>
      %9 = arith.index_cast %arg8 : index to i32
      %10 = arith.sitofp %9 : i32 to f32
      %11 = arith.divf %extracted, %10 : f32
      %12 = arith.addf %11, %arg5 : f32
      %13 = math.sqrt %12 : f32
      %cst_0 = arith.constant 1.000000e+00 : f32
      %14 = arith.divf %cst_0, %13 : f32
      %splat_1 = tensor.splat %14[%arg8] : tensor<?xf32>
      %15 = arith.mulf %7, %splat_1 : tensor<?xf32>
      %16 = arith.extf %1 : tensor<?xbf16> to tensor<?xf32>
      %cst_2 = arith.constant 1.000000e+00 : f32
      %splat_3 = tensor.splat %cst_2[%arg8] : tensor<?xf32>
      %17 = arith.addf %16, %splat_3 : tensor<?xf32>
      %18 = arith.mulf %15, %17 : tensor<?xf32>
      %19 = arith.truncf %18 : tensor<?xf32> to tensor<?xbf16>
      %20 = arith.extf %19 : tensor<?xbf16> to tensor<?xf32>
      %cst_4 = arith.constant 1.000000e+00 : f32
      %21 = arith.divf %cst_4, %arg6 : f32
      %splat_5 = tensor.splat %21[%arg8] : tensor<?xf32>
      %22 = arith.mulf %20, %splat_5 : tensor<?xf32>
      %23 = "kiln.to_e4m3"(%22) : (tensor<?xf32>) -> tensor<?xi8>
      "kiln.store"(%23, %arg3, %arg9) {layout = "rows"} : (tensor<?xi8>, memref<?x?xi8>, index) -> ()
      "kiln.store"(%6, %arg4, %arg9) {layout = "rows"} : (tensor<?xbf16>, memref<?x?xbf16>, index) -> ()
    }
    return
  }
}
