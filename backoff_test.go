package mysqllock

import (
	"testing"
	"time"
)

// TestPausesBetweenTriesGrowUpToHalfASecond: a pause is random, so callers that met in a deadlock do not meet again.
func TestPausesBetweenTriesGrowUpToHalfASecond(t *testing.T) {
	for tries, most := range map[int]time.Duration{
		0: 5 * time.Millisecond, 1: 10 * time.Millisecond, 6: 320 * time.Millisecond, 7: 500 * time.Millisecond, 1000: 500 * time.Millisecond,
	} {
		least, longest := most, time.Duration(0)
		for range 1000 {
			pause := backoff(tries)
			least, longest = min(least, pause), max(longest, pause)
		}
		if longest >= most || longest < most/2 || least < 0 || least > most/2 {
			t.Errorf("after %d tries pauses are of %v to %v, want them of less than %v", tries, least, longest, most)
		}
	}
}
