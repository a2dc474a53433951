# What a job under DynamICCL needs. dynamiccl-run reads it; so may any POSIX shell: . @DIR@/env.sh
#   DYNAMICCL_HOME  where `dynamiccl-deploy install` put everything. Default: as installed.
#   NCCL_PROFILER_PLUGIN  a job's own profiler, which stays in mode table.
DYNAMICCL_HOME=${DYNAMICCL_HOME:-@DIR@}
dynamiccl_tuner=$DYNAMICCL_HOME/lib/libnccl-tuner-dynamiccl
case ${DYNAMICCL_MODE:-table} in
  observe) export NCCL_PROFILER_PLUGIN="$DYNAMICCL_HOME/lib/libnccl-profiler-dynamiccl.so" ;;
  adaptive)
    export NCCL_TUNER_PLUGIN="$dynamiccl_tuner-adaptive.so"
    export NCCL_PROFILER_PLUGIN="$dynamiccl_tuner-adaptive.so"
    ;;
  *)
    # A vendor's tuner is asked first by a library of its own.
    export NCCL_TUNER_PLUGIN="$dynamiccl_tuner${DYNAMICCL_NEXT_TUNER:+-vendor}.so"
    # NCCL 2.27 tells a profiler alone which communicator it is. Ours hears no event; a job's own
    # stays.
    case ${NCCL_PROFILER_PLUGIN:-none} in
      [Nn][Oo][Nn][Ee] | *libnccl-tuner-dynamiccl*.so | *libnccl-profiler-dynamiccl.so)
        export NCCL_PROFILER_PLUGIN="$NCCL_TUNER_PLUGIN" ;;
    esac
    ;;
esac
unset dynamiccl_tuner
export DYNAMICCL_ARTIFACT="${DYNAMICCL_ARTIFACT:-$DYNAMICCL_HOME/artifact}"
