"""CPU kernels in C++, built with the package and chosen by instruction set at run time."""
