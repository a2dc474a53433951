# What a job under DynamICCL needs. dynamiccl-run reads it; so may any POSIX shell: . @DIR@/env.sh
DYNAMICCL_HOME=${DYNAMICCL_HOME:-@DIR@}
dynamiccl_library=$DYNAMICCL_HOME/lib/libnccl-tuner-dynamiccl
case ${DYNAMICCL_MODE:-table}${DYNAMICCL_NEXT_TUNER:++next} in
  table)
    export NCCL_TUNER_PLUGIN="$dynamiccl_library.so"
    # NCCL 2.27 tells a profiler alone which communicator it is. Ours hears no event; a job's own
    # stays.
    case ${NCCL_PROFILER_PLUGIN:-none} in
      [Nn][Oo][Nn][Ee] | *libnccl-tuner-dynamiccl*.so)
        export NCCL_PROFILER_PLUGIN="$dynamiccl_library.so" ;;
    esac
    ;;
  observe*) export NCCL_PROFILER_PLUGIN="$dynamiccl_library-adaptive.so" ;;
  # Live switching, or a vendor's tuner that is to be called first.
  *)
    export NCCL_TUNER_PLUGIN="$dynamiccl_library-adaptive.so"
    export NCCL_PROFILER_PLUGIN="$dynamiccl_library-adaptive.so"
    ;;
esac
unset dynamiccl_library
export DYNAMICCL_ARTIFACT="${DYNAMICCL_ARTIFACT:-$DYNAMICCL_HOME/artifact}"
