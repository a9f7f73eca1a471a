/* cpu.h - vector features of this processor that the operating system lets programs use. */
#ifndef ES_CPU_H
#define ES_CPU_H

/* 1 when the feature is present. Names as in /proc/cpuinfo on x86 with "_" between the words
   ("avx2", "avx512_vnni"), on Arm "dotprod", "i8mm", "fp16"; 0 for any other name. */
int es_cpu_has(const char *name);

#endif
