"""Runs a PyTorch program in the time that half a start takes: quick.py PROGRAM [ARGUMENT...].

Importing torch makes a million objects, none of them garbage: the collector rests meanwhile, and does not go through them
again when it is called or the program ends. From the program's first line on it works as ever. The program is __main__ of
this process, and cannot tell; torch is imported, and the probe's hooks are installed, where and as always.
"""
import functools
import gc
import pathlib
import sys


@functools.cache
def import_torch():
    """With what an optimizer imports of it when it is made."""
    gc.disable()
    import torch  # noqa: F401
    import torch._dynamo  # noqa: F401

    gc.freeze()
    gc.enable()


def run(program, arguments):
    sys.argv = [program, *arguments]
    sys.path[0] = str(pathlib.Path(program).resolve().parent)
    main = sys.modules["__main__"].__dict__
    code = compile(pathlib.Path(program).read_bytes(), program, "exec")
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    main.update(__file__=program, __doc__=None, __annotations__={})
    exec(code, main)


if __name__ == "__main__":
    import_torch()
    run(sys.argv[1], sys.argv[2:])
