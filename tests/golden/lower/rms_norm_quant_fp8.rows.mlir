module {
  func.func @rms_norm_quant_fp8(%arg0: memref<?x?xbf16>, %arg1: memref<?xbf16>, %arg2: memref<?x?xbf16>, %arg3: memref<?x?xi8>, %arg4: memref<?x?xbf16>, %arg5: f32, %arg6: f32, %arg7: index, %arg8: index) attributes {kiln.args = ["x", "weight", "residual", "out:out", "residual:out", "eps", "scale", "%rows", "%width"]} {
    scf.forall (%arg9) in (%arg7) {
      %0 = "kiln.load"(%arg0, %arg9) : (memref<?x?xbf16>, index) -> tensor<?xbf16>
      %1 = "kiln.load"(%arg1) : (memref<?xbf16>) -> tensor<?xbf16>
      %2 = "kiln.load"(%arg2, %arg9) : (memref<?x?xbf16>, index) -> tensor<?xbf16>
      %3 = "kiln.add"(%0, %2) : (tensor<?xbf16>, tensor<?xbf16>) -> tensor<?xbf16>
      %4 = "kiln.rms_norm"(%3, %1, %arg5) {gemma = true} : (tensor<?xbf16>, tensor<?xbf16>, f32) -> tensor<?xbf16>
      %5 = "kiln.quant_fp8_static"(%4, %arg6) : (tensor<?xbf16>, f32) -> tensor<?xi8>
      "kiln.store"(%5, %arg3, %arg9) {layout = "rows"} : (tensor<?xi8>, memref<?x?xi8>, index) -> ()
      "kiln.store"(%3, %arg4, %arg9) {layout = "rows"} : (tensor<?xbf16>, memref<?x?xbf16>, index) -> ()
    }
    return
  }
}
