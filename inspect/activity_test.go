package inspect_test

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// TestActivityIsNeverForZeroSeconds: a time that the clock has only just begun to tell is none.
func TestActivityIsNeverForZeroSeconds(t *testing.T) {
	for text, a := range map[string]inspect.Activity{
		"idle":                                  {For: time.Microsecond, Least: true},
		"idle for less than 1ms":                {For: time.Microsecond},
		"idle for 2ms at least":                 {For: 2 * time.Millisecond, Least: true},
		"has run a statement for less than 1ms": {Running: true},
		"has run for less than 1ms: DO 1":       {Running: true, For: 400 * time.Microsecond, Statement: "DO 1"},
	} {
		dbtest.Equal(t, "%s", a.String(), text)
	}
}
