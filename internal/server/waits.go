package server

import (
	"fmt"
	"regexp"
	"strconv"
	"time"
)

// Waits says, for a comment in a statement that waits, for how long its caller has waited when
// the statement is sent. With the age of the statement, which the server tells, that is since
// when the caller waits, whatever the clocks of both hosts say.
func Waits(since time.Time) string {
	return fmt.Sprintf("waits %d ms", time.Since(since).Milliseconds())
}

// WaitsComment is that comment.
func WaitsComment(since time.Time) string { return "/* mysqllock " + Waits(since) + " */ " }

var waits = regexp.MustCompile(`/\* mysqllock (?:[0-9a-f]+ )?waits ([0-9]{1,12}) ms \*/`)

// ReadWaits reads from a statement's text what Waits has said. ok is false if the text says
// nothing.
func ReadWaits(text string) (d time.Duration, ok bool) {
	m := waits.FindStringSubmatch(text)
	if m == nil {
		return 0, false
	}
	n, _ := strconv.ParseInt(m[1], 10, 64)
	return time.Duration(n) * time.Millisecond, true
}
