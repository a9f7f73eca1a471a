/* inlining.h - templates made of inline functions. A sanitised build leaves them functions: unrolled
   and checked load by load they would take minutes to compile, and it checks the same accesses. */
#ifndef ES_INLINING_H
#define ES_INLINING_H

#if defined(__SANITIZE_ADDRESS__)
#define ES_INLINE static __attribute__((unused))
#define ES_UNROLL
#elif defined(__clang__)
#define ES_INLINE static inline __attribute__((always_inline))
#define ES_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ES_INLINE static inline __attribute__((always_inline))
#define ES_UNROLL _Pragma("GCC unroll 8")
#endif

#endif
