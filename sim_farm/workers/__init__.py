"""Workers of a farm: physics workers step environments, render workers draw frames; hosts start them."""
