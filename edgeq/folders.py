"""The folders of the package that lie beside edgeq/ in a checkout, and inside it once installed."""

import os.path

OTHER_FOLDERS = ("converters", "runtime", "targets", "tools")


def search_path(package: str) -> list[str]:
    """Where `OTHER_FOLDERS` are found from `package`, the folder of edgeq/__init__.py: nowhere else if they lie in it.

    ImportError: they lie neither in it nor beside it.
    """
    for place in (package, os.path.dirname(package)):
        if all(os.path.isfile(os.path.join(place, folder, "__init__.py")) for folder in OTHER_FOLDERS):
            return [] if place == package else [place]
    raise ImportError(
        f"edgeq is not whole: {', '.join(OTHER_FOLDERS)} lie neither in {package} nor beside it. "
        "Install it from the package index, or from a checkout with: pip install --editable ."
    )
