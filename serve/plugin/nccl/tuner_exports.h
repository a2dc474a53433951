// What a tuner library of ours exports: one struct for each version of the ABI.
#pragma once

#include "nccl/tuner_abi.h"

#define DYNAMICCL_EXPORT __attribute__((visibility("default")))

extern "C" {
// `const` alone would give these internal linkage.
extern DYNAMICCL_EXPORT const ncclTuner_v2_t ncclTunerPlugin_v2;
extern DYNAMICCL_EXPORT const ncclTuner_v3_t ncclTunerPlugin_v3;
extern DYNAMICCL_EXPORT const ncclTuner_v4_t ncclTunerPlugin_v4;
extern DYNAMICCL_EXPORT const ncclTuner_v5_t ncclTunerPlugin_v5;
extern DYNAMICCL_EXPORT const ncclTuner_v6_t ncclTunerPlugin_v6;
}
