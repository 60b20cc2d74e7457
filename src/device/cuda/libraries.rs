//! Opens NVIDIA's libraries at run time: nothing here is needed to build, and one missing library is an error that names
//! it, says where it was looked for, and how to get it.
