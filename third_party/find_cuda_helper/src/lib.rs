//! The published `find_cuda_helper` panics where no CUDA toolkit is installed, and links against `libcuda` where one is.
//! A program built so would not start without a driver. `cuda-driver-shim` supplies the driver's symbols instead.

/// What the build scripts of cust and cust_raw call; nothing is left to do.
pub fn include_cuda() {}
