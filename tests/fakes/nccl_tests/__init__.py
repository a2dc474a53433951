"""A stand-in for the nccl-tests programs, for machines without a GPU.

It exists so that everything around a benchmark can be tested as it really runs: launchers, time
limits, parsers, a tuner plugin under NCCL's own call order. **Its figures say nothing about any
GPU**: they are the embedded simulator's, and its devices are called "FAKE H100".

What it prints, which options it knows and how it exits are those of the nccl-tests release in
`FAKE_NCCL_TESTS_VERSION` (releases.py lists them), after that release's `src/common.cu` and
`src/util.cu`. What NCCL does is after the release in `FAKE_NCCL_VERSION`: which tuner ABI it takes,
how `NCCL_ALGO` and `NCCL_PROTO` are read, what it logs. The cost model is that of the simulator
(2.27, H100) for every release.

There is no MPI in it. Rank and size come from the launcher's environment (world.py), no process
waits for another, and rank 0 makes up what the others would have told it.

Settings of the stand-in itself:

    FAKE_NCCL_TESTS_VERSION  nccl-tests release (2.19.6)
    FAKE_NCCL_VERSION        NCCL release (2.29.7)
    FAKE_SEED, FAKE_LAUNCH   the noise; without FAKE_LAUNCH every launch draws anew
    FAKE_NOISE               sigma of the noise (0.015); 0 switches noise and outliers off
    FAKE_GPUS                GPUs of this node (8)
    FAKE_SECONDS_PER_ROW     time that a row takes to appear (0)
    FAKE_SLOW                PROCESS:FACTOR, several with commas: its communicator is slower
    FAKE_SLOW_START          seconds before the communicator exists (0)
    FAKE_HANG, FAKE_CRASH, FAKE_WRONG
                             a Config key, and perhaps @collective: `NVLS/Simple`, `Ring/LL/8ch`,
                             `ABSTAIN@AllGather`. The first timed call that runs it never ends, dies
                             by SIGSEGV, or computes wrong values.
    FAKE_NO_MPI              any value: it was built without MPI, and each process is alone
    FAKE_OOM                 any value: the buffers do not fit
    FAKE_INIT_FAILS          any value: the communicator cannot be made
"""
