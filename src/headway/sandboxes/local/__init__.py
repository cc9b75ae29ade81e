"""Back ends that run on this machine, and what they share: launcher, control groups, seccomp, owners, the sweep."""
