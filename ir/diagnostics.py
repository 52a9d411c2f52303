"""Errors of declarations and bodies: what was found, where (file:line), what is legal."""


class DeclarationError(Exception):
    """An op, recipe or body that cannot be accepted. `location` is file:line of the declaration or of the
    body's statement.
    """

    def __init__(self, message: str, location: str = "") -> None:
        self.message, self.location = message, location
        super().__init__(f"{location}: {message}" if location else message)


class TypeCheckError(DeclarationError):
    """A body whose values do not fit together (types, shapes, operands)."""


class LegalityError(DeclarationError):
    """IR that a stage of the pipeline does not allow."""
