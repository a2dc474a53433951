// Asks the linker for the first version of a glibc function, which every glibc still has.
#pragma once

#if defined(__x86_64__)
#define DYNAMICCL_OLD_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define DYNAMICCL_OLD_GLIBC "GLIBC_2.17"
#else
#error "not built on this processor yet: name the glibc release that first supported it"
#endif

// The sanitizers put their own functions in place of these, and those have no versions.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DYNAMICCL_OLD_SYMBOL(name) static_assert(true, "")
#else
#define DYNAMICCL_OLD_SYMBOL(name) __asm__(".symver " #name "," #name "@" DYNAMICCL_OLD_GLIBC)
#endif
