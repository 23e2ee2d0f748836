"""Check that ``loopkit`` is loopkit-engine: a library for feedback control has the same import name."""

try:
    from loopkit.author import check_namesake
except ModuleNotFoundError as error:
    if error.name not in ("loopkit", "loopkit.author"):
        raise  # such as torch
    raise ModuleNotFoundError(
        "this needs loopkit-engine, and Python finds none, or another `loopkit`. Type: pip uninstall loopkit, then "
        "pip install --force-reinstall --no-deps loopkit-engine (in a clone: -e . instead of its name). If a folder "
        "called loopkit is beside your script, rename the folder",
        name=error.name,
    ) from error

check_namesake()
