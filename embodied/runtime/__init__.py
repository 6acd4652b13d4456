"""Where workers live. `inline`: all in this process, in order. `ray`: each an actor. The same classes either way."""
