"""Names of the `kiln` dialect that no declared op may take. Importing this needs no MLIR."""

ANY = "any"
STRUCTURAL = {
    "load": (("source", ANY), ("row", "variadic")),
    "store": (("value", ANY), ("target", ANY), ("row", "variadic")),
    "take_row": (("table", ANY), ("index", ANY)),
    "take_element": (("vector", ANY), ("index", ANY)),
    "take_columns": (("table", ANY), ("index", ANY), ("columns", ANY)),
    "permute": (("row", ANY), ("columns", ANY)),
    "columns": (),
    "row": (),
    "half": (("row", ANY),),
    "logistic": (("x", ANY),),
    "to_e4m3": (("x", ANY),),
    "to_e2m1": (("x", ANY),),
    "pack_e2m1": (("x", ANY),),
    "from_e4m3": (("code", ANY),),
    "absent": (),
}
"""Operations of the dialect that are not declared ops: memory, views and the conversions of
kiln.ir.functions.
"""
