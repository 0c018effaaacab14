"""Kernels of layers: C++ builds and their checks, pointwise functions, packed and quantised linear layers."""
