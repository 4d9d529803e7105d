"""Programs that tests start as processes of their own, to kill, freeze and interrupt them."""
