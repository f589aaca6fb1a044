"""The engine: runs rounds, exchanges trees and tokens with the drafter, and measures verifier and drafter."""
