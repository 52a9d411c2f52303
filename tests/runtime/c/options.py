"""What kiln_open and kiln_verify are given."""

import ctypes

Ed25519 = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *(ctypes.POINTER(ctypes.c_uint8),) * 2
)


class Root(ctypes.Structure):
    """kiln_root"""

    _fields_ = (
        ("path", ctypes.c_char_p),
        ("archive", ctypes.c_char_p),
        ("archive_bytes", ctypes.c_size_t),
        ("expect", ctypes.c_char_p),
        ("public_key", ctypes.c_char_p),
        ("minimum_generation", ctypes.c_int64),
        ("ed25519", Ed25519),
        ("ed25519_user", ctypes.c_void_p),
    )


class Options(ctypes.Structure):
    """kiln_options"""

    _fields_ = (
        ("root", ctypes.c_char_p),
        ("roots", ctypes.POINTER(Root)),
        ("root_count", ctypes.c_size_t),
        ("device", ctypes.c_char_p),
        ("expect", ctypes.c_char_p),
        ("public_key", ctypes.c_char_p),
        ("minimum_generation", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        ("disable", ctypes.c_char_p),
        ("driver_path", ctypes.c_char_p),
        ("poison_scratch", ctypes.c_int32),
        ("scratch_per_call", ctypes.c_int32),
        ("ed25519", Ed25519),
        ("ed25519_user", ctypes.c_void_p),
    )
