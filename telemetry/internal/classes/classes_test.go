package classes

import (
	"fmt"
	"slices"
	"testing"
)

func TestTheNumberOfClassesIsBounded(t *testing.T) {
	c := New(func(key string) string { return key })
	if got := c.Of([]string{"b", "", "a", "b", ""}); !slices.Equal(got, []string{"b", "other", "a"}) {
		t.Errorf("the classes are %q", got)
	}
	seen := make(map[string]bool)
	for i := range 10 * most {
		seen[c.Of([]string{fmt.Sprint(i)})[0]] = true
	}
	if len(seen) > most || !seen["other"] {
		t.Errorf("there are %d classes", len(seen))
	}
	if got := c.Of([]string{"a"}); got[0] != "a" {
		t.Errorf("a class that was known is %q now", got)
	}
	if got := New(nil).Of([]string{"a"}); got != nil {
		t.Errorf("without a function the classes are %q", got)
	}
}
