"""For files with odd values in them: the places where a value may be odd, and the line with which a file is refused."""


def nodes(value, path=()):
    """The path of each node of a document, its root first."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from nodes(value[key], (*path, key))


def refused(path, call):
    """The text with which `call(path)` refuses a file, one line that names it; None if it does not."""
    try:
        call(path)
    except ValueError as error:
        said = str(error)
    else:
        return None
    assert said.startswith(f"{path}: ")
    assert "\n" not in said
    assert len(said) < len(str(path)) + 500
    return said
