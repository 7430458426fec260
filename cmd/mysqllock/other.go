//go:build !unix

package main

import "github.com/spf13/cobra"

// unixCommands are none: process groups and their signals are Unix's.
func unixCommands(*target) []*cobra.Command { return nil }
