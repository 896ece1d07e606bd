"""What is solved: mixtures, the three problems, the objective, instances and bounds."""
