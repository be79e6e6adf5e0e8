"""KV of preempted requests in host memory, as the scheduler sees it; `plugin_swap` turns it on."""
