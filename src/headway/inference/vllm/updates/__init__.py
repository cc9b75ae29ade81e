"""Weight updates inside vLLM: staged, loaded aside or in place, probed, taken back."""
