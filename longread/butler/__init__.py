"""Training of TokenButler's predictors; what they are and how they are used is the policies'."""
