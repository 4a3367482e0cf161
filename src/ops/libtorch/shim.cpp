// What libtorch offers in C++ and the `tch` crate does not bind.
