"""Memory of tokens: keys and values, recurrent states, routed experts; on the device and in slower tiers."""
