"""Memory that a farm and its workers share: slots, frames, doorbells."""
