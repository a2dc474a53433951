"""Strong simple policies: what a learned one has to beat, on the same training bins."""
