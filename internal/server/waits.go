package server

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Bounded begins a SELECT that the server ends after d. MySQL skips the comment, MariaDB the hint.
func Bounded(d time.Duration) string {
	return fmt.Sprintf("/*M!100000 SET STATEMENT max_statement_time = %.3f FOR */ SELECT /*+ MAX_EXECUTION_TIME(%d) */ ", d.Seconds(), d.Milliseconds())
}

// Waits says, for a comment in a statement that waits, for how long its caller has waited when
// the statement is sent. With the age of the statement, which the server tells, that is since
// when the caller waits, whatever the clocks of both hosts say.
func Waits(since time.Time) string {
	return fmt.Sprintf("waits %d ms", time.Since(since).Milliseconds())
}

// WaitsNamed begins a SELECT that waits for a named lock for at most bound, for a caller that waits
// since then, and says for how many seconds GET_LOCK is to wait. The server limits the wait as
// well, so that a waiter whose client is gone disappears by itself.
func (f Flavour) WaitsNamed(since time.Time, bound time.Duration) (begin, seconds string) {
	bound = max(bound, time.Millisecond)
	comment := "/* mysqllock " + Waits(since) + " */ "
	if f.Settings {
		return "SELECT " + comment, fmt.Sprintf("%.3f", bound.Seconds())
	}
	return fmt.Sprintf("SELECT /*+ MAX_EXECUTION_TIME(%d) */ ", bound.Milliseconds()) + comment, fmt.Sprintf("%.0f", math.Ceil(bound.Seconds()))
}

// ReadWaits reads from a statement's text what Waits has said. ok is false if that says nothing.
func ReadWaits(text string) (d time.Duration, ok bool) {
	_, text, _ = strings.Cut(text, "/* mysqllock ")
	text, _, whole := strings.Cut(text, " ms */")
	_, number, said := strings.Cut(" "+text, " waits ")
	n, err := strconv.ParseUint(number, 10, 40)
	return time.Duration(n) * time.Millisecond, whole && said && err == nil
}
