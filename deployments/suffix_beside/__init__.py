"""The setting of trees that continue earlier text beside a drafter's, and their figures."""
