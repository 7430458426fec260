package inspect_test

import (
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/mysqllock/mysqllock/inspect"
)

func TestAKeyIsOfTheFirstClassItMatches(t *testing.T) {
	class := inspect.Classes("nightly", "order:*:*:done", "order:*", "*.tmp", "ab*ba")
	for key, want := range map[string]string{
		"nightly": "nightly", "nightly2": "other", "": "other",
		"order:1": "order:*", "order:": "order:*", "an order:1": "other",
		"order:1:2:done": "order:*:*:done", "order:1:done": "order:*", "order::done": "order:*", "order:::done": "order:*:*:done",
		"x.tmp": "*.tmp", "x.tmpl": "other",
		"aba": "other", "abba": "ab*ba", "ab*ba": "ab*ba",
	} {
		if got := class(key); got != want {
			t.Errorf("%q is of %q, want %q", key, got, want)
		}
	}
	dbtest.Equal(t, "without patterns a key is of %q", inspect.Classes()("k"), inspect.OtherKeys)
}
