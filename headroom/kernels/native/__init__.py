"""CPU kernels in C++: built with the package, for the instruction set found at run time."""
