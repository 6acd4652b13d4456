"""Language models as policies, and tasks in words that they answer: an action is a token, a decision is an answer."""
