"""Recording: open episodes, their validation, the slot that each goes to, the commit that publishes it."""
