package mysqllock

import (
	"io"
	"reflect"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
)

// TestEveryFieldOfAnEventReachesTheObserver: an event of the handle is copied for users, whole.
func TestEveryFieldOfAnEventReachesTheObserver(t *testing.T) {
	from := handle.Event{
		Kind: handle.Lost, Keys: []string{"k"}, Strategy: "lease", Shared: true, Leadership: true,
		Start: time.Now(), Duration: 1, Held: 2, Token: 3, Long: true, Holder: &Holder{}, Err: io.EOF,
	}
	for _, v := range []reflect.Value{reflect.ValueOf(from), reflect.ValueOf(event(from))} {
		for i := range v.NumField() {
			if v.Field(i).IsZero() {
				t.Errorf("%s of a %v is empty", v.Type().Field(i).Name, v.Type())
			}
		}
	}
}
