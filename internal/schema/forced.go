package schema

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Forced is who has taken a lease away from its holder. It is kept in the key's row until it
// happens again, so that the holder is told also when others have had the key since.
type Forced struct {
	Token   uint64    // of the lease
	At      time.Time // the server's
	Account string    // of the connection: user@host, as the server sees it
	Process string    // host:pid:program
	Reason  string    // "" if none was given
}

// MaxReason is the longest reason, in bytes: the column has room for it beside the rest.
const MaxReason = 500

// SetReleased is the assignment that notes a Forced, for the row r before its token is raised.
//
//	released = CONCAT_WS('\0', r.token, UTC_TIMESTAMP(6), USER(), 'db1:4711:shop', 'it hangs')
func SetReleased(process, reason string) string {
	clean := func(s string) string { return Literal(strings.ReplaceAll(s, "\x00", " ")) }
	return "released = CONCAT_WS(x'00', r.token, UTC_TIMESTAMP(6), USER(), " + clean(process) + ", " + clean(reason) + ")"
}

// ReadForced reads what SetReleased has written; ok is false if that is nothing.
func ReadForced(released string) (f Forced, ok bool) {
	part := strings.Split(released, "\x00")
	if len(part) != 5 {
		return f, false
	}
	token, err := strconv.ParseUint(part[0], 10, 64)
	at, err2 := time.Parse("2006-01-02 15:04:05.999999", part[1])
	return Forced{token, at, part[2], part[3], part[4]}, err == nil && err2 == nil
}

// String says who has done it, from where, when and why.
func (f Forced) String() string {
	why := "no reason was given"
	if f.Reason != "" {
		why = "the reason: " + strconv.Quote(f.Reason)
	}
	return fmt.Sprintf("%s UTC by %q in process %q; %s", f.At.Format(time.DateTime), f.Account, f.Process, why)
}
