// Lets the plug-in load into processes whose C++ library is older than the compiler.

#include <new>

// Containers call this function for a length that no memory has. libstdc++ has it since GCC 11 (GLIBCXX_3.4.29), and
// NIXL's wheels need only the libstdc++ of GCC 8. It is weak, because a static libstdc++ brings its own.
namespace std {
[[noreturn]] void __throw_bad_array_new_length();
[[gnu::weak]] void __throw_bad_array_new_length() { throw std::bad_alloc(); }
}  // namespace std
