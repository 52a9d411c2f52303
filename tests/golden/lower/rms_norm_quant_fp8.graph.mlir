module {
  func.func @rms_norm_quant_fp8(%arg0: tensor<?x?xbf16>, %arg1: tensor<?xbf16>, %arg2: tensor<?x?xbf16>, %arg3: f32, %arg4: f32) -> (tensor<?x?xi8>, tensor<?x?xbf16>) {
    %0 = "kiln.add"(%arg0, %arg2) : (tensor<?x?xbf16>, tensor<?x?xbf16>) -> tensor<?x?xbf16>
    %1 = "kiln.rms_norm"(%0, %arg1, %arg3) {gemma = true} : (tensor<?x?xbf16>, tensor<?xbf16>, f32) -> tensor<?x?xbf16>
    %2 = "kiln.quant_fp8_static"(%1, %arg4) : (tensor<?x?xbf16>, f32) -> tensor<?x?xi8>
    return %2, %0 : tensor<?x?xi8>, tensor<?x?xbf16>
  }
}
