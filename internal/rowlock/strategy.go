package rowlock

import (
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// Traits of row locks, for those who choose among strategies. [Locker.Begin] and
// [Locker.Join] take them after BEGIN, and [Locker.Raise] comes before COMMIT.
var Traits = strategy.Traits{Name: hint.StrategyRow, Table: true, Inside: true, Excludes: true}
