package main

import "runtime/debug"

// version is that of the module: what "go install …@version" has built.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
