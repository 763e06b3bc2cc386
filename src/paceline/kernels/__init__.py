"""C++ kernels for CPUs, compiled on the user's machine for that machine.

`build` compiles and loads them, `abi` describes their structures to ctypes, `packing` lays weights out for
them.
Everything here has a torch equivalent that is used where no compiler is found.
"""
