/* FAKE libnvidia-ml.so.1: a stand-in for NVIDIA's management library, for tests and benchmarks on
 * machines without a driver. It says nothing about real NVML: every figure is made up, and a call
 * costs next to nothing (FAKE_NVML_SPIN_US makes it cost something).
 *
 *   gcc -shared -fPIC -O2 -Wl,-soname,libnvidia-ml.so.1 -o DIR/libnvidia-ml.so.1 fake_nvml.c
 *   LD_LIBRARY_PATH=DIR python ...
 *
 * Environment, read at each call:
 *   FAKE_NVML_GPUS      number of GPUs (default 2)
 *   FAKE_NVML_REASONS   clock event reasons of GPU 0, e.g. 0x40 (default 0x1: idle); others: 0x1
 *   FAKE_NVML_ECC       uncorrected ECC errors of GPU 0 after so many questions for them
 *   FAKE_NVML_MIG       1 = GPU 0 is in MIG mode
 *   FAKE_NVML_DENY      comma list FUNCTION=CODE or field:ID=CODE: answer with that nvmlReturn_t
 *   FAKE_NVML_DENIED    file that gets one line for each denied question
 *   FAKE_NVML_SPIN_US   microseconds of CPU that every call burns
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int Return;
typedef unsigned long Device; /* index + 1, in place of NVML's opaque pointer */
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3 };

static int number(const char* name, int fallback) {
  const char* text = getenv(name);
  return text && *text ? (int)strtol(text, NULL, 0) : fallback;
}

static Return denied(const char* what) {
  int spin = number("FAKE_NVML_SPIN_US", 0);
  if (spin > 0) {
    struct timespec now, began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - began.tv_sec) * 1000000L + (now.tv_nsec - began.tv_nsec) / 1000 < spin);
  }
  const char* list = getenv("FAKE_NVML_DENY");
  size_t length = strlen(what);
  for (const char* at = list; at && *at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
    if (strncmp(at, what, length) != 0 || at[length] != '=') continue;
    const char* path = getenv("FAKE_NVML_DENIED");
    FILE* file = path ? fopen(path, "a") : NULL;
    if (file) {
      fprintf(file, "%s\n", what);
      fclose(file);
    }
    return atoi(at + length + 1);
  }
  return OK;
}

#define CHECKED(name)            \
  do {                           \
    Return code = denied(name);  \
    if (code != OK) return code; \
  } while (0)

/* Bytes that a link carried: grows with time, 100 GB/s. */
static unsigned long long link_kib(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (unsigned long long)(now.tv_sec * 1000 + now.tv_nsec / 1000000) * 100000ULL;
}

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

Return nvmlSystemGetCudaDriverVersion_v2(int* version) {
  CHECKED("nvmlSystemGetCudaDriverVersion_v2");
  *version = 13000;
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

Return nvmlDeviceGetClockInfo(Device device, int type, unsigned* mhz) {
  CHECKED("nvmlDeviceGetClockInfo");
  *mhz = type == 2 ? 2619 : 1980 - 15 * (unsigned)(device - 1);
  return OK;
}

Return nvmlDeviceGetPowerUsage(Device device, unsigned* milliwatts) {
  CHECKED("nvmlDeviceGetPowerUsage");
  *milliwatts = 71200 + 1000 * (unsigned)(device - 1);
  return OK;
}

Return nvmlDeviceGetTemperature(Device device, int sensor, unsigned* degrees) {
  (void)sensor;
  CHECKED("nvmlDeviceGetTemperature");
  *degrees = 31 + (unsigned)(device - 1);
  return OK;
}

typedef struct {
  unsigned version;
  int sensor;
  int degrees;
} Temperature;

Return nvmlDeviceGetTemperatureV(Device device, Temperature* answer) {
  CHECKED("nvmlDeviceGetTemperatureV");
  answer->degrees = 41 + (int)(device - 1);
  return OK;
}

typedef struct {
  unsigned gpu, memory;
} Shares;

Return nvmlDeviceGetUtilizationRates(Device device, Shares* shares) {
  (void)device;
  CHECKED("nvmlDeviceGetUtilizationRates");
  shares->gpu = 97;
  shares->memory = 12;
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

typedef struct {
  unsigned field, scope;
  long long timestamp, latency;
  unsigned type; /* 3 = unsigned long long */
  Return code;
  union {
    double d;
    unsigned long long ull;
  } value;
} Field;

Return nvmlDeviceGetFieldValues(Device device, int count, Field* fields) {
  (void)device;
  CHECKED("nvmlDeviceGetFieldValues");
  for (int i = 0; i < count; ++i) {
    char name[32];
    Field* field = fields + i;
    snprintf(name, sizeof name, "field:%u", field->field);
    field->code = denied(name);
    field->type = 3;
    switch (field->field) {
      case 138:
        field->value.ull = link_kib();
        break;
      case 139:
        field->value.ull = link_kib() / 2;
        break;
      case 202:
      case 204:
        field->value.ull = link_kib() * 1024;
        break;
      case 38:
      case 52:
      case 59:
      case 160:
        field->value.ull = 0;
        break;
      default:
        field->code = NOT_SUPPORTED;
    }
  }
  return OK;
}

Return nvmlDeviceGetPcieThroughput(Device device, int direction, unsigned* kbytes_per_s) {
  (void)device;
  CHECKED("nvmlDeviceGetPcieThroughput");
  usleep(20000);
  *kbytes_per_s = direction == 0 ? 25000 : 12000;
  return OK;
}

Return nvmlDeviceGetCudaComputeCapability(Device device, int* major, int* minor) {
  (void)device;
  CHECKED("nvmlDeviceGetCudaComputeCapability");
  *major = 9;
  *minor = 0;
  return OK;
}

Return nvmlDeviceGetPersistenceMode(Device device, unsigned* mode) {
  (void)device;
  CHECKED("nvmlDeviceGetPersistenceMode");
  *mode = 1;
  return OK;
}

Return nvmlDeviceGetEccMode(Device device, unsigned* current, unsigned* pending) {
  (void)device;
  CHECKED("nvmlDeviceGetEccMode");
  *current = *pending = 1;
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
