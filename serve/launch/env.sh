# What a job under DynamICCL needs. dynamiccl-run reads it; so may any POSIX shell: . @DIR@/env.sh
DYNAMICCL_HOME=${DYNAMICCL_HOME:-@DIR@}
if [ "${DYNAMICCL_MODE:-table}" != observe ]; then
  export NCCL_TUNER_PLUGIN="$DYNAMICCL_HOME/lib/libnccl-tuner-dynamiccl.so"
fi
export NCCL_PROFILER_PLUGIN="$DYNAMICCL_HOME/lib/libnccl-tuner-dynamiccl.so"
export DYNAMICCL_ARTIFACT="${DYNAMICCL_ARTIFACT:-$DYNAMICCL_HOME/artifact}"
