"""The sentences and names of the co-reference task, all written for it.

Each place has an introduction that ends where its name belongs, and a question whose answer is that
name. Fillers say nothing about places.
"""

from __future__ import annotations

PLACES = (
    (
        "After nine days on the mule track the surveyors came down to a walled harbour town, "
        "which the pilots of that coast call",
        "What do the pilots call the walled harbour town that the surveyors came down to",
    ),
    (
        "Beyond the salt marsh, where the road ends at a row of tarred boats, lies the village of",
        "What is the name of the village that lies where the road ends at the tarred boats",
    ),
    (
        "The old map in the captain's drawer shows one island with a red cross upon it, "
        "and under the cross is written",
        "What name is written under the red cross on the captain's map",
    ),
    (
        "High in the northern hills stands an observatory of grey stone that its keepers named",
        "What did its keepers name the observatory of grey stone in the northern hills",
    ),
    (
        "The caravan stopped for water at the last oasis before the dunes, "
        "known to every driver there as",
        "By what name do the drivers know the last oasis before the dunes",
    ),
    (
        "Under the glacier the miners dug a hall large enough for a thousand lamps and called it",
        "What did the miners call the hall that they dug under the glacier",
    ),
    (
        "In spring the bell founders moved their furnaces to a valley of clay and birches named",
        "What is the valley of clay and birches named to which the bell founders moved",
    ),
    (
        "The ferry crosses the wide brown river only twice a week, "
        "and on its far bank is the market of",
        "Which market is on the far bank of the wide brown river",
    ),
    (
        "No tree grows on the windy plateau where the kite makers live, and the plateau is called",
        "What is the windy plateau called where the kite makers live",
    ),
    (
        "Her grandfather was born in a lighthouse on a reef that sailors fear, the reef of",
        "On which reef stood the lighthouse in which her grandfather was born",
    ),
    (
        "The monks copied their books in a cave above the waterfall, and they called that cave",
        "What did the monks call the cave above the waterfall in which they copied their books",
    ),
    (
        "Two railways meet in the middle of the moor, and the lonely junction bears the name of",
        "What name does the lonely junction in the middle of the moor bear",
    ),
    (
        "For the queen's winter the architects raised a palace of glass upon the lake and named it",
        "What did the architects name the palace of glass that they raised upon the lake",
    ),
    (
        "The botanist found the blue orchid in only one forest, "
        "which the people who live around it call",
        "What do the people call the only forest in which the botanist found the blue orchid",
    ),
    (
        "When the dam was closed the water covered a town of eleven mills, the drowned town of",
        "Which drowned town of eleven mills did the water cover when the dam was closed",
    ),
    (
        "The smugglers met in a cove that cannot be seen from any ship, and their word for it was",
        "What was the smugglers' word for the cove that cannot be seen from any ship",
    ),
    (
        "At the foot of the volcano there is a garden kept warm by the ground itself, "
        "the garden of",
        "Which garden at the foot of the volcano is kept warm by the ground itself",
    ),
    (
        "The astronauts chose a plain of fine white dust for their first house and named the place",
        "What did the astronauts name the plain of white dust where they put their first house",
    ),
    (
        "Every seventh year the weavers carry their looms to a meadow across the pass, "
        "a meadow called",
        "What is the meadow called to which the weavers carry their looms every seventh year",
    ),
    (
        "The bridge with the crooked tower leads into a quarter of dyers and tanners known as",
        "As what is the quarter known into which the bridge with the crooked tower leads",
    ),
    (
        "The expedition wintered in a bay without ice, and the cook painted its new name on a "
        "plank:",
        "Which name did the cook paint on a plank for the bay where the expedition wintered",
    ),
    (
        "In the desert the engineers built a city of mirrors that follow the sun, and it is called",
        "What is the city of mirrors called that the engineers built in the desert",
    ),
    (
        "The shepherds bring their quarrels to a ring of nine stones on the heath, the ring of",
        "To which ring of nine stones do the shepherds bring their quarrels",
    ),
    (
        "Half a day upstream the explorers passed a deserted temple, marked in their diary as",
        "As what is the deserted temple marked in the diary of the explorers",
    ),
)

NAMES = (
    *("Velmarith", "Ostrendyl", "Karuvanth", "Ilquorash", "Dromessek", "Thalvuren", "Zephlorin"),
    *("Quarnholt", "Ubrexil", "Fenngarrow", "Myrrakesh", "Olvandrix", "Sorquellith", "Bracthuun"),
    *("Yselmoor", "Wendrakar", "Cavorrith", "Lutheziel", "Pharnoquay", "Grimvessa", "Ardulmex"),
    *("Nolcathry", "Eskurabel", "Hovranthil", "Jorquemar", "Tirvallox", "Umbreskar", "Ravendusk"),
    *("Xandrivole", "Caltrosim", "Vossmereth", "Elquindar", "Morvaskel", "Sithrunel", "Belgorash"),
    *(
        "Orphandrel",
        "Kelzovar",
        "Dathromere",
        "Ulvershaan",
        "Prelvakost",
        "Azmoriveth",
        "Filgarund",
    ),
    *("Nexarholm", "Torvulien", "Isquamber", "Gathrovel", "Lormandesh", "Wyrkelloth"),
)

PHILOSOPHY = (
    "A promise weighs nothing until the day it must be kept, and then it weighs everything.",
    "Those who fear all change forget that the self which fears was made by change.",
    "To doubt one thing well takes more patience than to believe a hundred things badly.",
    "Freedom without a purpose is an open gate in a field where nobody wishes to walk.",
    "We call a thing simple when we have stopped looking at it, not when we have understood it.",
    "Memory is not a store of the past but a habit of telling it again.",
    "A just law asks the strong to lose something that the weak could not even see.",
    "If every choice had one reason, regret would be no more than bad arithmetic.",
    "The wise do not know more answers; they ask fewer questions that answer themselves.",
    "What we love we do not see clearly, and what we see clearly we seldom love.",
    "Time takes away the things we have and gives us back the names of them.",
    "Courage is not the absence of doubt but the refusal to let it vote twice.",
    "A mind that agrees with itself on all matters has only one visitor, and locks the door.",
    "Silence proves nothing, yet most of what we believe was told to us by silence.",
    "To forgive is to stop rewriting a letter that will never be sent.",
    "Beauty asks for no reason, which is why we spend our lives giving it reasons.",
    "A truth that harms nobody and helps nobody is still worth the trouble of finding.",
    "Hope looks forward with the eyes of experience closed and its hands open.",
    "No one is as free as the person who can say without shame that they were wrong.",
    "The measure of a thought is the number of other thoughts that it makes unnecessary.",
    "Habit is a kind servant in the morning and a hard master after dark.",
    "We inherit our questions from the dead and leave them, better worded, to the unborn.",
)

FOOD = (
    "The onions were cooked in butter for an hour until they were brown, soft and sweet as jam.",
    "A little vinegar in the dough keeps the crust of the pie tender and easy to roll.",
    "The soup of lentils and smoked paprika is served with a spoon of cold yoghurt on top.",
    "Fresh figs, split and filled with goat's cheese, need only honey and a few walnuts.",
    "The rice is fried with ginger and spring onions and gets a soft egg at the very end.",
    "Dark bread with cold butter and radishes is the best lunch on a warm day in May.",
    "The dumplings float when they are done, and they are rolled in toasted crumbs and sugar.",
    "Roasted pumpkin turns smoky when it is brushed with oil and left under a fierce grill.",
    "The curry begins with mustard seeds that crackle in hot oil before the tomatoes go in.",
    "Lemon peel, bay and a single clove give the poached pears their clear, sharp perfume.",
    "The noodles are pulled by hand, boiled for a minute and dressed with black sesame.",
    "A pinch of salt in the chocolate makes the bitter taste rounder and the sweet one deeper.",
    "The beans had been soaked overnight and simmered with sage until they were like cream.",
    "The pancakes are thin as lace, spread with apricot jam and folded into quarters.",
    "Grilled sardines want nothing but coarse salt, parsley and a piece of torn bread.",
    "The mushrooms were pickled with dill, garlic and a handful of blackcurrant leaves.",
    "Cold cucumber soup with mint and buttermilk is ready as fast as one can stir it.",
    "The oven must be very hot so that the flat loaves puff up before their tops turn dark.",
    "An omelette is best when its middle still trembles and its edge has no colour at all.",
    "The plum dumplings are served with browned butter, poppy seed and a cloud of cinnamon.",
    "Crisp potatoes are boiled first, shaken in the pot until rough, and roasted in goose fat.",
    "The custard is strained twice, baked in a bath of water and chilled until it quivers.",
)

MATH = (
    "If seven pencils cost 91 cents, then one pencil costs 13 cents and a dozen costs 156.",
    "A train that covers 180 miles in three hours needs five hours for 300 miles.",
    "The sum of the first ten odd numbers is 100, which is ten times ten.",
    "When 48 is divided into parts as 5 to 3, the parts are 30 and 18.",
    "A square of side 14 has an area of 196, and half of it is 98.",
    "If x plus 17 is 45, then x is 28, and twice x is 56.",
    "Out of 250 seeds 80 percent came up, so that 200 plants stood in the rows.",
    "Three pumps fill the tank in eight hours, so six pumps fill it in four.",
    "The angles of a triangle are 35 and 65 degrees, so the third one is 80 degrees.",
    "A number that leaves 2 when divided by 5 and 1 when divided by 3 is 22.",
    "The mean of 12, 18 and 27 is 19, for their sum is 57.",
    "A rope of 72 feet is cut into pieces of 4 feet, which takes 17 cuts.",
    "If a coat of 120 crowns is sold at a quarter off, the buyer pays 90 crowns.",
    "The product of 16 and 25 is 400, since four times 25 is already 100.",
    "Two dice show a sum of seven in six ways out of thirty-six.",
    "A clock that loses 3 minutes a day is 21 minutes slow after one week.",
    "The square root of 1,369 is 37, because 37 times 37 is 1,369.",
    "If five cats eat five fish in five minutes, one cat eats one fish in the same time.",
    "A field of 60 by 45 yards has a fence of 210 yards around it.",
    "Doubling 3 seven times gives 384, which is three times 128.",
    "From 15 players a captain and a deputy can be chosen in 210 ways.",
    "Half of a third of 126 is 21, whichever of the two is taken first.",
)
