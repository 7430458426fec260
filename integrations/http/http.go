// Package httplock tells HTTP clients what became of a lock.
//
//	if err := sell(r.Context(), product); err != nil {
//		if httplock.Error(w, err) {
//			return // 409 or 503, with Retry-After
//		}
//		http.Error(w, "…", http.StatusInternalServerError)
//	}
package httplock

import (
	"errors"
	"net/http"

	"github.com/mysqllock/mysqllock"
)

// retryAfter is what Retry-After says, in seconds: the least that it can.
const retryAfter = "1"

// Status returns the status for an error of a lock; ok is false for every other error.
//
//   - 409 Conflict: another caller has the key, and this one would not wait (ErrLocked); or
//     another has committed under it (ErrConflict).
//   - 503 Service Unavailable: this caller has waited as long as it may (ErrTimeout), or
//     could not be served (ErrExhausted, ErrNoAnswer, ErrDeadlock); or the lock was lost, and nothing is
//     committed (ErrLost).
//
// After each of them the client may send the same request again, if the request had committed
// nothing before the error: a handler with several transactions, as in a Do under a lease or an
// advisory lock, answers the error of a later one as any other. An ErrLost whose outcome is
// unknown, as after a connection that broke in COMMIT, is none of them, nor one of a lease that was
// gone at its end, when all was committed ([mysqllock.Error].Op is "release"), and no mistake of the
// program is (ErrUnsafe, ErrStaleRead, a bad hint): answer those as any other error.
func Status(err error) (status int, ok bool) {
	var e *mysqllock.Error
	switch {
	case errors.Is(err, mysqllock.ErrLost):
		if errors.As(err, &e) && (e.Op == "commit" || e.Op == "release") {
			return 0, false
		}
		return http.StatusServiceUnavailable, true
	case errors.Is(err, mysqllock.ErrTimeout), errors.Is(err, mysqllock.ErrExhausted),
		errors.Is(err, mysqllock.ErrNoAnswer), errors.Is(err, mysqllock.ErrDeadlock):
		return http.StatusServiceUnavailable, true
	case errors.Is(err, mysqllock.ErrLocked), errors.Is(err, mysqllock.ErrConflict):
		return http.StatusConflict, true
	}
	return 0, false
}

// Error answers a request whose err is one of a lock, with [Status] and Retry-After, and
// reports whether it did. It does not tell the client who has the lock: that is in err, for
// the log.
func Error(w http.ResponseWriter, err error) bool {
	status, ok := Status(err)
	if !ok {
		return false
	}
	w.Header().Set("Retry-After", retryAfter)
	http.Error(w, http.StatusText(status), status)
	return true
}
