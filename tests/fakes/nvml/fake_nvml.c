/* FAKE libnvidia-ml.so.1: a stand-in for NVIDIA's management library, for tests and benchmarks on
 * machines without a driver. It says nothing about real NVML: every figure is made up.
 *
 *   gcc -shared -fPIC -O2 -Wl,-soname,libnvidia-ml.so.1 -o DIR/libnvidia-ml.so.1 fake_nvml.c
 *   LD_LIBRARY_PATH=DIR python ...
 *
 * Environment, read at each call:
 *   FAKE_NVML_GPUS      number of GPUs (default 2)
 *   FAKE_NVML_REASONS   clock event reasons of GPU 0, e.g. 0x40 (default 0x1: idle); others: 0x1
 *   FAKE_NVML_ECC       uncorrected ECC errors of GPU 0 after so many questions for them
 *   FAKE_NVML_MIG       1 = GPU 0 is in MIG mode
 *   FAKE_NVML_CLUSTER   last byte of the fabric cluster's UUID, of all GPUs but GPU 0 (0: none)
 *   FAKE_NVML_DENY      comma list FUNCTION=CODE: answer with that nvmlReturn_t
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Return;
typedef unsigned long Device; /* index + 1, in place of NVML's opaque pointer */
enum { OK = 0, INVALID = 2 };

static int number(const char* name, int fallback) {
  const char* text = getenv(name);
  return text && *text ? (int)strtol(text, NULL, 0) : fallback;
}

static Return denied(const char* what) {
  const char* list = getenv("FAKE_NVML_DENY");
  size_t length = strlen(what);
  for (const char* at = list; at && *at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
    if (strncmp(at, what, length) != 0 || at[length] != '=') continue;
    return atoi(at + length + 1);
  }
  return OK;
}

#define CHECKED(name)            \
  do {                           \
    Return code = denied(name);  \
    if (code != OK) return code; \
  } while (0)

Return nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  CHECKED("nvmlInitWithFlags");
  return OK;
}
Return nvmlShutdown(void) { return OK; }

Return nvmlSystemGetDriverVersion(char* text, unsigned size) {
  CHECKED("nvmlSystemGetDriverVersion");
  snprintf(text, size, "999.10.fake");
  return OK;
}

Return nvmlDeviceGetCount_v2(unsigned* count) {
  CHECKED("nvmlDeviceGetCount_v2");
  *count = (unsigned)number("FAKE_NVML_GPUS", 2);
  return OK;
}

Return nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) {
  CHECKED("nvmlDeviceGetHandleByIndex_v2");
  if (index >= (unsigned)number("FAKE_NVML_GPUS", 2)) return INVALID;
  *device = index + 1;
  return OK;
}

Return nvmlDeviceGetName(Device device, char* text, unsigned size) {
  (void)device;
  CHECKED("nvmlDeviceGetName");
  snprintf(text, size, "FAKE H100");
  return OK;
}

static unsigned long long reasons(Device device) {
  return device == 1 ? (unsigned long long)number("FAKE_NVML_REASONS", 1) : 1ULL;
}

Return nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long* bits) {
  CHECKED("nvmlDeviceGetCurrentClocksEventReasons");
  *bits = reasons(device);
  return OK;
}

Return nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long* bits) {
  CHECKED("nvmlDeviceGetCurrentClocksThrottleReasons");
  *bits = reasons(device);
  return OK;
}

Return nvmlDeviceGetTotalEccErrors(Device device, int error, int counter,
                                   unsigned long long* count) {
  static int asked;
  (void)error;
  (void)counter;
  CHECKED("nvmlDeviceGetTotalEccErrors");
  int after = number("FAKE_NVML_ECC", 0);
  if (device == 1) ++asked;
  *count = device == 1 && after && asked > after ? 2 : 0;
  return OK;
}

Return nvmlDeviceGetMigMode(Device device, unsigned* current, unsigned* pending) {
  CHECKED("nvmlDeviceGetMigMode");
  *current = *pending = device == 1 && number("FAKE_NVML_MIG", 0) ? 1 : 0;
  return OK;
}

Return nvmlDeviceGetCudaComputeCapability(Device device, int* major, int* minor) {
  (void)device;
  CHECKED("nvmlDeviceGetCudaComputeCapability");
  *major = 9;
  *minor = 0;
  return OK;
}

Return nvmlDeviceGetGpuFabricInfo(Device device, unsigned char* info) {
  CHECKED("nvmlDeviceGetGpuFabricInfo");
  memset(info, 0, 28);
  if (device != 1) info[15] = (unsigned char)number("FAKE_NVML_CLUSTER", 0);
  return OK;
}

Return nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned* active) {
  (void)device;
  CHECKED("nvmlDeviceGetNvLinkState");
  if (link >= 18) return INVALID;
  *active = 1;
  return OK;
}

Return nvmlDeviceGetNvLinkVersion(Device device, unsigned link, unsigned* version) {
  (void)device;
  (void)link;
  CHECKED("nvmlDeviceGetNvLinkVersion");
  *version = 6; /* NVML_NVLINK_VERSION_4_0 */
  return OK;
}

Return nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned link, int* type) {
  (void)device;
  (void)link;
  CHECKED("nvmlDeviceGetNvLinkRemoteDeviceType");
  *type = 2; /* a switch */
  return OK;
}
