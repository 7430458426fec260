package handle

import (
	"slices"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/lease"
	"github.com/mysqllock/mysqllock/internal/optimistic"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// known are the strategies that there are. One that lies outside of transactions is
// made in [Handle.makeStrategies], too.
var known = []strategy.Traits{rowlock.Traits, lease.Traits, advisory.Traits, optimistic.Traits}

// Strategies are the names of the strategies, the default first.
func Strategies() (names []string) {
	for _, t := range known {
		names = append(names, t.Name)
	}
	return names
}

// traitsOf returns the traits of the strategy of that name, which the hint has checked.
func traitsOf(name string) strategy.Traits {
	return known[slices.IndexFunc(known, func(t strategy.Traits) bool { return t.Name == name })]
}
